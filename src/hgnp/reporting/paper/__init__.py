"""The paper's tables and figures next to what runs came to.

`reported` has the paper's numbers, `found` reads and classifies runs, `deviations` says how they differ from what the paper
states, `claims` and `times` compare number by number, `verdict` judges, `outcome` has all of it, `figures` the charts.
"""
