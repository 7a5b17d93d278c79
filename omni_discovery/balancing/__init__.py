"""Which of several replicas gets a request: policies and the indices behind them."""
