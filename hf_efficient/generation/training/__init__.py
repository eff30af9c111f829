"""Distilling draft heads from a target model on text it generates itself."""
