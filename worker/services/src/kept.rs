//! [`Kept`]: outputs of a call that stay on its server, for other calls.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use pushpull_common::ids::{Incarnation, TaskId};
use pushpull_common::protocol::message::OutputRef;
use pushpull_common::protocol::wire::Text;

use super::call_session::{CallReply, LinkId, OutputId};
use super::error::ServiceError;
use super::runtime::client_core::{ClientCore, ReplyFuture};
use super::value::{Value, ValueType};

/// The kept outputs of a call, which stay on the server that has run it: see
/// [`super::FunctionClient::keep`].
///
/// Other calls may have the outputs as inputs at once, also before this call has ended. The server
/// keeps the outputs as long as one clone of `Kept` exists and the client is alive.
#[derive(Clone, Debug)]
pub struct Kept(Arc<KeptCall>);

#[derive(Debug)]
struct KeptCall {
    core: ClientCore,
    link: LinkId,
    task: TaskId,
    call: u64,
    /// The server that has the outputs; 0 while that is unknown.
    server: AtomicU64,
}

impl Kept {
    pub(crate) fn new(core: ClientCore, link: LinkId, task: TaskId, call: u64) -> Kept {
        Kept(Arc::new(KeptCall { core, link, task, call, server: AtomicU64::new(0) }))
    }

    /// Returns the task that holds the outputs.
    pub fn task(&self) -> &TaskId {
        &self.0.task
    }

    pub(crate) fn id(&self) -> OutputId {
        let KeptCall { core, link, call, .. } = &*self.0;
        let owner = core.incarnation();
        let server = core.holder_of(*link, *call);
        // The client may know by now that this server has lost them. Others are refused by the
        // next.
        if server != Incarnation(0) {
            self.0.server.store(server.0, Ordering::Relaxed);
        }
        let server = Incarnation(self.0.server.load(Ordering::Relaxed));
        OutputId { owner, server, call: *call }
    }

    /// Fetches an output. Waits for the end of the call.
    ///
    /// # Errors
    /// [`ServiceError::Refused`] with the reason if there is no such output.
    pub async fn fetch(
        &self,
        output: &str,
        deadline: Option<Instant>,
    ) -> Result<Value, ServiceError> {
        let kept = &self.0;
        kept.core.fetch(kept.link, self.output(output)?, deadline).await
    }

    /// Returns the name of an output on the wire.
    pub(crate) fn output(&self, output: &str) -> Result<OutputRef, ServiceError> {
        let OutputId { owner, server, call } = self.id();
        let output = Text::new(output).ok_or_else(|| too_long(output))?;
        Ok(OutputRef { owner, server, call, output })
    }
}

fn too_long(output: &str) -> ServiceError {
    let doing = format!("fetch {output:?}");
    ServiceError::Invalid { doing, reason: "the name is too long".to_owned() }
}

impl Drop for KeptCall {
    fn drop(&mut self) {
        self.core.release(self.link, vec![self.call]);
    }
}

/// A call under way whose outputs stay on its server. As a future it returns their types.
#[derive(Debug)]
#[must_use = "dropping it cancels the call"]
pub struct Keeping {
    pub(crate) kept: Kept,
    pub(crate) reply: ReplyFuture,
}

impl Keeping {
    /// Returns the outputs for other calls, which may be made before this call has ended.
    pub fn kept(&self) -> &Kept {
        &self.kept
    }
}

impl Future for Keeping {
    type Output = Result<(Kept, Vec<(String, ValueType)>), ServiceError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let reply = std::task::ready!(Pin::new(&mut self.reply).poll(context));
        Poll::Ready(reply.and_then(|reply| match reply {
            CallReply::Kept(types) => {
                // Its server is known now.
                self.kept.id();
                Ok((self.kept.clone(), types))
            }
            _ => Err(ServiceError::Ended { doing: "keep outputs".to_owned() }),
        }))
    }
}
