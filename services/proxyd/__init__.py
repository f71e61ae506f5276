"""proxyd decides where a request goes, and carries it there and back byte for byte."""
