from tools.bench.harness import main

raise SystemExit(main())
