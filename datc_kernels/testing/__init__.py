"""Inputs, float64 truth and error budgets that tests and benchmarks share. Nothing here is used by the ops."""
