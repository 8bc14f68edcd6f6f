//! [`CaseCounts`]: the results of tests that print what they have seen and what is absent.

use std::fmt::Display;
use std::process::ExitCode;

/// The numbers of cases.
#[derive(Default)]
pub(crate) struct CaseCounts {
    passed: u32,
    failed: u32,
    skipped: u32,
}

impl CaseCounts {
    /// Prints and counts the result of a case: a line about what has been seen, or the fault.
    pub(crate) fn count(&mut self, name: &str, outcome: Result<impl Display, String>) {
        match outcome {
            Ok(seen) => {
                println!("{name}: {seen}");
                self.passed += 1;
            }
            Err(fault) => {
                println!("{name}: FAILED: {fault}");
                self.failed += 1;
            }
        }
    }

    /// Prints and counts a case that this machine cannot run.
    pub(crate) fn skip(&mut self, name: &str, reason: &str) {
        println!("SKIPPED: {name}: {reason}");
        self.skipped += 1;
    }

    /// Prints the numbers as the last line of a test. Fails if a case has.
    pub(crate) fn finish(self, test: &str) -> ExitCode {
        let CaseCounts { passed, failed, skipped } = self;
        println!("{test}: {passed} passed, {failed} failed, {skipped} skipped");
        if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
