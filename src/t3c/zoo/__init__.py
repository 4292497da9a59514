"""Models and data to try T3C on."""
