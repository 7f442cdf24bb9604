"""Schedules as values: actions, policies, passes, verification, simulation, drawing."""
