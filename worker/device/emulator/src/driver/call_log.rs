//! [`CallLog`]: which functions were called, and which calls are to fail.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::code::{DriverErrorCode, DriverResult};
use super::settings::PlannedFailure;

/// The log of calls of driver functions, and the faults to inject into later ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallLog {
    counts: BTreeMap<String, u64>,
    failures: Vec<PlannedFailure>,
}

impl CallLog {
    /// Lets the `nth` call from now of a function fail. The name `*` stands for every function.
    pub(crate) fn fail(&mut self, failure: PlannedFailure) {
        self.failures.push(failure);
    }

    /// Notes a call. Fails if it is to fail.
    pub(crate) fn enter(&mut self, name: &str) -> DriverResult {
        self.count(name);
        let mut result = Ok(());
        self.failures.retain_mut(|(failing, left, code)| {
            if failing != name && failing != "*" {
                return true;
            }
            *left = left.saturating_sub(1);
            if *left == 0 {
                result = Err(DriverErrorCode(*code));
            }
            *left > 0
        });
        result
    }

    /// Counts an event under a name.
    pub(crate) fn count(&mut self, name: &str) {
        if let Some(count) = self.counts.get_mut(name) {
            *count += 1;
        } else {
            self.counts.insert(name.to_owned(), 1);
        }
    }

    /// One line for each name, with its count.
    pub(crate) fn text(&self) -> String {
        self.counts.iter().fold(String::new(), |mut text, (name, count)| {
            // Writing into a string does not fail.
            let _ = writeln!(text, "{name} {count}");
            text
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_fails_once() {
        let mut log = CallLog::default();
        log.fail(("cuInit".to_owned(), 2, 100));
        log.fail(("*".to_owned(), 4, 999));
        assert_eq!(log.enter("cuInit"), Ok(()));
        assert_eq!(log.enter("cuOther"), Ok(()));
        assert_eq!(log.enter("cuInit"), Err(DriverErrorCode(100)));
        assert_eq!(log.enter("cuInit"), Err(DriverErrorCode(999)));
        assert_eq!(log.enter("cuInit"), Ok(()));
        assert_eq!(log.text(), "cuInit 4\ncuOther 1\n");
    }
}
