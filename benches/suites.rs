//! The suites beside the ceilings of the machine (`cargo bench -p benches --bench suites`).

use std::process::ExitCode;

fn main() -> ExitCode {
    benches::main()
}
