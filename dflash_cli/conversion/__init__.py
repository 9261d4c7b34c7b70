"""Steps of a conversion: `plan` decides, `proof` compares with the target, `write` copies, `verify` reads back."""
