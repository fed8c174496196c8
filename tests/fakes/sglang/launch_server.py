"""What ``python -m sglang.launch_server`` finds when ``tests/fakes`` is on the path."""

from fake_sglang import main

if __name__ == "__main__":
    main()
