"""The paper's experiments: networks, data, configurations, presets and studies."""
