"""How questions are asked: the session, the round, and requests and findings that several questions share."""
