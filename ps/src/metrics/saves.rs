//! The status of checkpoint saves.

use std::time::{Duration, Instant};

/// The status of checkpoint saves, on the step owner. See [`crate::PsHandle::saves`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveStatus {
    /// The checkpoint last saved by this process; `None` if it has saved none.
    pub newest: Option<String>,
    /// The time since that save.
    pub since_success: Option<Duration>,
    /// The number of failed saves since then, or since the start. 0 if the last save succeeded.
    pub failed_in_a_row: u64,
    /// The cause of the last of these failures.
    pub last_error: Option<String>,
}

/// The saver's record of its saves.
#[derive(Clone, Debug, Default)]
pub(crate) struct SaveRecord {
    newest: Option<(String, Instant)>,
    failed_in_a_row: u64,
    last_error: Option<String>,
}

impl SaveRecord {
    /// Records a success. Returns how many saves in a row had failed before it.
    pub(crate) fn saved(&mut self, now: Instant, checkpoint: &str) -> u64 {
        let failed = self.failed_in_a_row;
        *self = SaveRecord { newest: Some((checkpoint.to_owned(), now)), ..SaveRecord::default() };
        failed
    }

    /// Records a failure. Returns how many saves in a row have failed, including it.
    pub(crate) fn failed(&mut self, cause: &str) -> u64 {
        self.failed_in_a_row += 1;
        self.last_error = Some(cause.to_owned());
        self.failed_in_a_row
    }

    pub(crate) fn status(&self, now: Instant) -> SaveStatus {
        let (newest, since) = self.newest.clone().unzip();
        SaveStatus {
            newest,
            since_success: since.map(|since: Instant| now.saturating_duration_since(since)),
            failed_in_a_row: self.failed_in_a_row,
            last_error: self.last_error.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_count_until_a_save_succeeds() {
        let start = Instant::now();
        let mut record = SaveRecord::default();
        assert_eq!(record.status(start), SaveStatus::default());
        assert_eq!((record.failed("full"), record.failed("gone")), (1, 2));
        let status = record.status(start);
        assert_eq!((status.failed_in_a_row, status.since_success), (2, None));
        assert_eq!(status.last_error.as_deref(), Some("gone"));
        assert_eq!(record.saved(start, "ckpt-1-5"), 2);
        assert_eq!(record.failed("full"), 1);
        let status = record.status(start + Duration::from_secs(7));
        assert_eq!(status.newest.as_deref(), Some("ckpt-1-5"));
        assert_eq!(status.since_success, Some(Duration::from_secs(7)));
    }
}
