"""Factories of reward models: the quickstart's, which the package ships, and others to study methods on."""
