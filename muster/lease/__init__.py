"""One writer for a run: claims on its folder and its storage by fencing tokens, and what the folder holds from before."""
