"""Measurements, one JSON a run. Tables in docs are generated from the JSONs, never typed."""
