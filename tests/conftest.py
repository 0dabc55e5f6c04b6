"""A list of plugins; each fixture file says what it gives."""

pytest_plugins = [
    "tests.fixtures.run",
    "tests.fixtures.kafka",
    "tests.fixtures.postgres",
    "tests.fixtures.topics",
    "tests.fixtures.processes",
    "tests.fixtures.clock",
    "tests.fixtures.signals",
]
