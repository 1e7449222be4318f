"""One short module a family: what it adds to the common decoder, and its table of weight names."""
