"""What crosses processes: records, their bytes, the names on the broker, and the rules that all readers share."""
