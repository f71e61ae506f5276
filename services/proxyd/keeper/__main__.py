"""``python -m services.proxyd.keeper``: started by supervisord as an event listener."""

from services.proxyd.keeper.daemon import main

if __name__ == "__main__":
    main()
