"""Adapters to other packages: one file per extension point of transformers, PEFT, accelerate, lm_eval and optimum."""
