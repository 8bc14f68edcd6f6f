//! How the saving of checkpoints goes.

use std::time::{Duration, Instant};

/// How the saving of checkpoints goes, on the task that owns the step. See [`crate::PsHandle::saves`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveStatus {
    /// The checkpoint that this process saved last; `None` if it has saved none.
    pub newest: Option<String>,
    /// How long ago that was.
    pub since_success: Option<Duration>,
    /// How many saves have failed since then, or since the start. 0 if the last save did not fail.
    pub failed_in_a_row: u64,
    /// Why the last of them failed.
    pub last_error: Option<String>,
}

/// What the saver knows of its saves.
#[derive(Clone, Debug, Default)]
pub(crate) struct SaveRecord {
    newest: Option<(String, Instant)>,
    failed_in_a_row: u64,
    last_error: Option<String>,
}

impl SaveRecord {
    /// A checkpoint was saved; how many saves in a row had failed before.
    pub(crate) fn saved(&mut self, now: Instant, checkpoint: &str) -> u64 {
        let failed = self.failed_in_a_row;
        *self = SaveRecord { newest: Some((checkpoint.to_owned(), now)), ..SaveRecord::default() };
        failed
    }

    /// A save has failed; how many in a row have, with this one.
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
