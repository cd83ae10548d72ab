"""What stands before the answer of a thinking model, one file per format: REASONING wraps the answer's parser."""
