"""What is made of runs: curves, comparisons, the hybrid, charts, pages, the paper next to them; and timed inference."""
