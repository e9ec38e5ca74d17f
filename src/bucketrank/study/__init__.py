"""The paper's study: a grid of trainings for each of its tables, run, resumed, measured and written up."""
