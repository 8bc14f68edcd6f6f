//! [`EndSignals`]: the signals that end a program.

use std::io;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::file_size_signal::fail_writes_instead;

/// The signals that end a program: it ends its work, and does not die.
#[derive(Debug)]
pub(crate) struct EndSignals(Vec<(SignalKind, Signal)>);

impl EndSignals {
    /// Handles SIGINT, SIGTERM, and SIGHUP unless that is already ignored, as under `nohup`. Writes
    /// beyond the limit of a file fail from then on.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub(crate) fn watch() -> io::Result<EndSignals> {
        let mut kinds = vec![SignalKind::interrupt(), SignalKind::terminate()];
        // If /proc does not say whether SIGHUP is ignored, its disposition is left alone.
        let status = std::fs::read_to_string("/proc/self/status");
        if status.is_ok_and(|status| !ignores_hangup(&status)) {
            kinds.push(SignalKind::hangup());
        }
        fail_writes_instead()?;
        let watch = |kind| Ok((kind, signal(kind)?));
        kinds.into_iter().map(watch).collect::<io::Result<_>>().map(EndSignals)
    }

    /// Completes when one of the signals has arrived.
    pub(crate) async fn any(&mut self) {
        self.next().await;
    }

    /// Returns the next of the signals, once it has arrived.
    pub(crate) async fn next(&mut self) -> SignalKind {
        std::future::poll_fn(|context| {
            let mut signals = self.0.iter_mut();
            let came = signals
                .find_map(|(kind, signal)| signal.poll_recv(context).is_ready().then_some(*kind));
            came.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

/// Returns whether a process ignores SIGHUP, from the text of its `/proc/PID/status`: bit 0 of the
/// `SigIgn` mask is SIGHUP. Without such a mask SIGHUP counts as ignored.
fn ignores_hangup(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bit_of_the_signal_mask_is_the_hangup() {
        let status = |mask| format!("Name:\tx\nSigIgn:\t{mask}\nSigCgt:\t0000000000000001\n");
        assert!(ignores_hangup(&status("0000000000001001")));
        assert!(!ignores_hangup(&status("0000000000001000")));
        assert!(ignores_hangup("Name:\tx\n"));
    }
}
