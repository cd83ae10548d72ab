"""What fuzzers try. A few inputs are part of the suite; `pytest --fuzz 1000 TEST` tries a thousand times as many."""
