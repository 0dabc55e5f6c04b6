"""Measurements of Afluente beside what people would pick instead, each with its own servers and its own check."""
