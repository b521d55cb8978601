"""Files: atomic writes, weights, exports, and reading run folders."""
