"""Files: written whole or not at all, weights, exports, and what a run left behind."""
