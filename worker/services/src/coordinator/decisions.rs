//! The decisions of a coordinator about its workers and calls, beside those of its dispatch.

use std::time::Duration;

use pushpull_common::effect_window::EffectWindow;
use pushpull_common::protocol::limits::EFFECT_WINDOW;
use pushpull_common::protocol::{EffectRef, Refusal};
use pushpull_worker::OpenedCoordinator;

use super::config::CoordinatorConfig;
use crate::call::Call;
use crate::call_session::CallOrder;
use crate::dispatch::{
    AttemptEnd, Dispatch, DispatchConfig, DispatchInput, MakingEnd, ResourceId, WorkerId,
};
use crate::error::ServiceError;

/// The timeout of a request for the description of an absent worker. A worker that answers is
/// present.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause before the next check whether a worker is absent.
pub(crate) const PROBE_INTERVAL: Duration = Duration::from_millis(100);

/// Returns the dispatch of a coordinator. Calls that have settled on every shard have ended.
pub(crate) fn dispatch(
    config: &CoordinatorConfig,
    workers: usize,
    opened: Option<&OpenedCoordinator>,
) -> Dispatch<ServiceError> {
    // Without a name no shard counts the calls, so only the queue limits them.
    let window = opened.map_or(config.queue_max as u64, |_| EFFECT_WINDOW);
    let settings = DispatchConfig {
        workers: workers as u32,
        queue_max: config.queue_max,
        calls_per_worker: config.calls_per_worker,
        window,
        retry_for: config.retry_for,
        timeouts_max: config.timeouts_max,
        planted: config.planted,
    };
    Dispatch::new(settings, opened.map_or(EffectWindow::default(), |opened| opened.window))
}

/// Returns the order of an attempt of a call. It ends with its connection, because the dispatch
/// repeats it elsewhere.
pub(crate) fn attempt_order(
    call: &Call,
    scheduled: Option<EffectRef>,
) -> Result<CallOrder, ServiceError> {
    let order = call.order(false)?;
    Ok(CallOrder { ends_with_connection: true, scheduled, ..order })
}

/// Returns the end of an attempt for the dispatch. `uses_kept` says that its call uses a per-worker
/// value.
pub(crate) fn attempt_end(
    error: Option<&ServiceError>,
    uses_kept: bool,
) -> AttemptEnd<ServiceError> {
    match error {
        None => AttemptEnd::Done,
        // The worker has restarted, and lacks what it had.
        Some(ServiceError::Refused { refusal: Refusal::NoOutput { .. }, .. }) if uses_kept => {
            AttemptEnd::Lost
        }
        Some(error) => end_of_error(error),
    }
}

/// Returns the end of a call that makes a per-worker value, for its worker.
pub(crate) fn making_end(
    worker: WorkerId,
    resource: ResourceId,
    error: Option<&ServiceError>,
) -> DispatchInput<ServiceError> {
    let end = match error.map(end_of_error) {
        None | Some(AttemptEnd::Done) => MakingEnd::Made,
        Some(AttemptEnd::Lost) => return DispatchInput::WorkerLost { worker },
        Some(AttemptEnd::Retry(_) | AttemptEnd::TimedOut(_)) => MakingEnd::Retry,
        Some(AttemptEnd::Final(error)) => MakingEnd::Failed(error),
    };
    DispatchInput::MakingEnded { worker, resource, end }
}

/// Returns whether another execution may succeed in spite of the error.
pub(crate) fn is_transient(error: &ServiceError) -> bool {
    matches!(end_of_error(error), AttemptEnd::Lost | AttemptEnd::Retry(_))
}

/// Returns the end of an attempt that has met an error.
fn end_of_error(error: &ServiceError) -> AttemptEnd<ServiceError> {
    match error {
        ServiceError::Lost { .. }
        | ServiceError::Unavailable { .. }
        | ServiceError::Protocol { .. }
        // The coordinator has not cancelled it: the server stops, or the execution has ended in
        // which the coordinator is.
        | ServiceError::Cancelled { .. }
        | ServiceError::Refused { refusal: Refusal::Stopping {}, .. } => AttemptEnd::Lost,
        ServiceError::Timeout { .. } => AttemptEnd::TimedOut(error.clone()),
        ServiceError::Failed { retry: true, .. }
        | ServiceError::Refused {
            refusal:
                // Inputs that would fit. What is in their place may be free at the next attempt.
                Refusal::Memory { .. }
                | Refusal::Busy { .. }
                | Refusal::Unreturned { .. }
                | Refusal::NoOutput { .. },
            ..
        } => AttemptEnd::Retry(error.clone()),
        _ => AttemptEnd::Final(error.clone()),
    }
}

#[cfg(test)]
mod tests {
    use pushpull_common::protocol::wire::Text;

    use super::*;

    #[test]
    fn a_per_worker_value_that_takes_too_long_is_made_again() {
        let doing = "call \"open\"".to_owned();
        let task = "/job:worker/task:2".to_owned();
        let waited = Duration::from_secs(1);
        let awaited = "a thread".to_owned();
        let slow =
            ServiceError::Timeout { doing: doing.clone(), task: task.clone(), waited, awaited };
        let detail = "no data".to_owned();
        let failed = ServiceError::Failed { doing, task, retry: false, detail };
        for (error, expected) in
            [(&slow, MakingEnd::Retry), (&failed, MakingEnd::Failed(failed.clone()))]
        {
            match making_end(WorkerId(0), ResourceId(0), Some(error)) {
                DispatchInput::MakingEnded { end, .. } => assert_eq!(end, expected),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn only_some_refusals_may_be_met_once() {
        let text = Text::clipped;
        let memory = Refusal::Memory { what: text("inputs"), bytes: 2, left: 1 };
        let too_large =
            Refusal::Input { function: text("f"), input: text("x"), detail: text("too large") };
        let table = [
            (Refusal::Stopping {}, true),
            (memory, true),
            (Refusal::Busy { what: text("calls"), limit: 3 }, true),
            (too_large, false),
            (Refusal::Denied {}, false),
            (Refusal::Role { role: 3, kind: 1 }, false),
        ];
        for (refusal, expected) in table {
            let doing = "call \"f\"".to_owned();
            let task = "/job:worker/task:2".to_owned();
            let error = ServiceError::Refused { doing, task, refusal };
            assert_eq!(is_transient(&error), expected, "{error}");
        }
    }
}
