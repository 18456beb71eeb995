"""What tests share: processes of every kind, worlds without processes, and what is expected of them."""
