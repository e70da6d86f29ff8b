"""Bad inputs by area, one table each; test_bad_input.py runs them all."""
