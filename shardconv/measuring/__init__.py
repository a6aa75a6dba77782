"""The bytes that a rank needs in addition to its weights, found by running its model without memory."""
