from t3c.cli import main

main()
