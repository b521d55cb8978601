from hgnp.demo import main

main()
