"""The command ``megatron-async`` and its smaller tools."""
