"""Model card template (TEMPLATE.md), and the cards of models made with hf_efficient with the numbers behind them."""
