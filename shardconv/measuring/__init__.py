"""The bytes that a rank needs beside its weights, by running its model without memory."""
