//! Inputs of a call that its client does not send: variables and outputs of other tasks.

use std::sync::Arc;
use std::time::Instant;

use pushpull_common::error::Chain;
use pushpull_common::ids::TaskId;
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::OutputRef;
use pushpull_common::protocol::refusal::Detail;

use super::call_session::Admission;
use super::error::ServiceError;
use super::execution_waits::ExecutionWaits;
use super::runtime::client_core::ClientCore;
use super::service::{Failure, output_awaited};
use super::value::Value;
use super::variables::ServerVariables;

/// Fetches variables of the parameter servers, and outputs that calls have left on other tasks.
#[derive(Debug)]
pub(crate) struct InputResolver {
    pub(crate) variables: Arc<ServerVariables>,
    pub(crate) client: ClientCore,
}

impl InputResolver {
    /// Pulls a variable for an input of a function, after its admission.
    pub(crate) async fn variable(
        &self,
        function: &str,
        input: &str,
        variable: &str,
        admission: &Admission,
        waits: &ExecutionWaits,
    ) -> Result<Value, Failure> {
        let pulled = self.variables.pull(variable, admission, waits).await;
        pulled.map_err(|error| match error {
            // Servers that cannot be reached may be back for another execution.
            super::variables::VariablePullError::Servers { detail, retry } => {
                Failure::Failed { retry, detail }
            }
            super::variables::VariablePullError::Unsuitable { detail } => {
                unsuitable(function, input, detail)
            }
            super::variables::VariablePullError::Refused(refusal) => Failure::Refused(refusal),
        })
    }

    /// Fetches an output from another task, after its admission.
    pub(crate) async fn fetch(
        &self,
        task: &TaskId,
        of: OutputRef,
        deadline: Option<Instant>,
        admission: Admission,
    ) -> Result<Value, Failure> {
        let final_failure = |detail| Failure::Failed { retry: false, detail };
        let link = self.client.link_of_task(task).map_err(final_failure)?;
        let awaited = output_awaited(&of, task);
        let fetched = self.client.fetch_admitted(link, of, deadline, Some(admission)).await;
        fetched.map_err(|error| fetch_failure(error, awaited))
    }
}

/// Returns the failure of an execution that lacks an output of another task. That task's deadline
/// precedes this one a little, and both follow from the deadline of the call.
fn fetch_failure(error: ServiceError, awaited: String) -> Failure {
    match error {
        ServiceError::Timeout { waited, .. } => {
            let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
            let awaited = Detail::shortened(awaited);
            Failure::Refused(Refusal::Deadline { waited_ms, awaited })
        }
        ServiceError::Refused { refusal, .. } => Failure::Refused(refusal),
        error => Failure::Failed { retry: true, detail: Chain(&error).to_string() },
    }
}

/// Returns the refusal of an input that does not suit a function.
pub(crate) fn unsuitable(function: &str, input: &str, detail: String) -> Failure {
    Failure::Refused(Refusal::Input {
        function: Detail::clipped(function),
        input: Detail::clipped(input),
        detail: Detail::clipped(detail),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pushpull_common::ids::Incarnation;
    use pushpull_common::protocol::wire::Text;

    use super::*;

    #[test]
    fn a_deadline_that_passes_while_an_output_is_awaited_is_that_of_the_call() {
        let task = TaskId::worker(3);
        let owner = Incarnation(1);
        let server = Incarnation(2);
        let output = Text::clipped("v");
        let awaited = output_awaited(&OutputRef { owner, server, call: 7, output }, &task);
        let doing = "fetch \"v\"".to_owned();
        let name = task.to_string();
        let error = |awaited: &str| ServiceError::Timeout {
            doing: doing.clone(),
            task: name.clone(),
            waited: Duration::from_millis(900),
            awaited: awaited.to_owned(),
        };
        for text in ["the answer of /job:worker/task:3", "a connection to /job:worker/task:3"] {
            match fetch_failure(error(text), awaited.clone()) {
                Failure::Refused(Refusal::Deadline { waited_ms: 900, awaited }) => {
                    assert_eq!(
                        awaited.as_str(),
                        "the output \"v\" of call 7 on /job:worker/task:3"
                    );
                }
                other => panic!("{other:?}"),
            }
        }
        let reason = "refused".to_owned();
        let waited = Duration::ZERO;
        let away = ServiceError::Unavailable { doing, task: name, waited, reason };
        assert!(matches!(fetch_failure(away, awaited), Failure::Failed { retry: true, .. }));
    }
}
