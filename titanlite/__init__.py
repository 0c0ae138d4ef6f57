"""titanlite: pretraining of Llama-style language models over one DeviceMesh."""
