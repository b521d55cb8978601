"""Whole experiments from a configuration: models, data, presets, and what is made of their runs."""
