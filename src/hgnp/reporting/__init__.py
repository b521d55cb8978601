"""Reports about runs: curves of accuracy against κ, comparisons, the hybrid, charts, HTML pages; inference timing."""
