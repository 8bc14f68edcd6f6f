//! [`DescriptorWatch`]: reports that the process is out of descriptors.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pushpull_net::{is_out_of_descriptors, open_files_limit};

use crate::panic_message::contained;
use crate::services::out_of_descriptors::OutOfDescriptors;

/// The shortest time between two reports. Newcomers try again every second, each with an error.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Receives the report that a process is out of descriptors.
#[derive(Clone)]
pub(crate) struct DescriptorReport(Arc<dyn Fn(&OutOfDescriptors) + Send + Sync>);

impl DescriptorReport {
    pub(crate) fn new(report: impl Fn(&OutOfDescriptors) + Send + Sync + 'static) -> Self {
        DescriptorReport(Arc::new(report))
    }
}

impl fmt::Debug for DescriptorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DescriptorReport").finish_non_exhaustive()
    }
}

/// Reports errors for lack of descriptors.
#[derive(Debug)]
pub(crate) struct DescriptorWatch {
    report: Option<DescriptorReport>,
    reported_at: Mutex<Option<Instant>>,
}

impl DescriptorWatch {
    pub(crate) fn new(report: Option<DescriptorReport>) -> DescriptorWatch {
        DescriptorWatch { report, reported_at: Mutex::default() }
    }

    /// Reports an error, if it says that no descriptor is left and no report was made lately.
    pub(crate) fn check(&self, error: &io::Error) {
        let Some(DescriptorReport(report)) = &self.report else { return };
        if !is_out_of_descriptors(error) {
            return;
        }
        let now = Instant::now();
        // A time is one value.
        let mut reported_at = self.reported_at.lock().unwrap_or_else(PoisonError::into_inner);
        let last = reported_at.map(|at| now.saturating_duration_since(at));
        if last.is_some_and(|since| since < REPORT_INTERVAL) {
            return;
        }
        *reported_at = Some(now);
        drop(reported_at);
        let out = OutOfDescriptors { limit: open_files_limit(), cause: error.to_string() };
        // The server goes on after a panic in the report. There is nobody to be told.
        let _ = contained("on_out_of_descriptors", || report(&out));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lack_of_descriptors_is_reported_and_not_again_at_once() {
        let reports: Arc<Mutex<Vec<OutOfDescriptors>>> = Arc::default();
        let told = reports.clone();
        let watch = DescriptorWatch::new(Some(DescriptorReport::new(move |out| {
            told.lock().unwrap().push(out.clone());
            panic!("the log is full");
        })));
        let too_many = io::Error::from_raw_os_error(24);
        watch.check(&io::ErrorKind::ConnectionReset.into());
        watch.check(&too_many);
        watch.check(&too_many);
        let reports = reports.lock().unwrap();
        assert_eq!(reports.len(), 1);
        let text = reports[0].to_string();
        let expected =
            "no connection can be accepted: Too many open files (os error 24); this process";
        assert!(text.starts_with(expected), "{text}");
        DescriptorWatch::new(None).check(&too_many);
    }
}
