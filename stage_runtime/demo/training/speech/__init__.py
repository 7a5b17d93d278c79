"""How the talker and the vocoder of the demo were made: data, codec, training, and a recogniser to measure them."""
