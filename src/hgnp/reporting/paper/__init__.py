"""The paper's tables and figures next to the results of runs.

`reported` has the paper's numbers, `results` reads and classifies runs, `deviations` lists how they differ from the paper's
settings, `accuracy` and `times` compare number by number, `verdict` judges, `report` collects the rows, `figures` has charts.
"""
