"""The demo model: a thinker that does sums and a painter that draws the answer by hand."""
