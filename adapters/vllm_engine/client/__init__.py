"""The client's side of one engine process: started, spoken to, supervised, published to."""
