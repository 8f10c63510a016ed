"""Commands for those who develop or size laneweave; nothing imports them."""
