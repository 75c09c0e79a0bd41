"""Where requests go: plans over the live workers, and each request's way through its plan. No torch, no model code."""
