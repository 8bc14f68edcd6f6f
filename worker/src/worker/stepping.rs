//! A push, the next token and the values for it as one operation.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use pushpull_common::ids::GlobalStep;

use super::{Worker, token_of};
use crate::client::PullCall;
use crate::error::Error;
use crate::handles::PushHandle;
use crate::outcome::{Push, Stepped};
use crate::params::{Gradients, Params};
use crate::runtime::{Call, Caller};
use crate::session::{Command, Read};
use crate::token::Token;

impl Worker {
    /// Pushes gradients, takes the next token and pulls the values for it: what [`Worker::push`],
    /// [`Worker::token`] and [`Worker::pull`] do one after the other, with one wait instead of three.
    ///
    /// The request for the values leaves right behind the gradients where they will be those of the next
    /// token, as they usually are: in synchronous mode, and where one shard holds all variables.
    /// Otherwise they are asked for once that token is there. `params` is for [`Stepped::next`], if that
    /// is a token; if it is not, whether `params` has been replaced is open.
    ///
    /// An error is one of the push, which is as for [`Worker::push`]. Dropping the future does to the push
    /// what dropping its handle does.
    pub async fn push_and_pull(
        &mut self,
        token: Token,
        gradients: Gradients,
        params: &mut Params,
    ) -> Result<Stepped, Error> {
        let joined = self.joined("push")?.clone();
        if !joined.plan.is_same(&params.plan) {
            return Err(Error::ForeignBuffer);
        }
        let next = GlobalStep(token.step() + 1);
        let synchronous = self.client.welcomed.synchronous;
        let push = self.push(token, gradients);
        let lent = self.client.caller.lenders().lend(joined.plan.shards());
        if !synchronous && (lent || joined.plan.shards() != [self.client.owner]) {
            // Another shard than the step owner would send values without what has just been pushed, and
            // so would be those that are read where they lie.
            let push = push.await?;
            return Ok(Stepped { push, next: self.next(None, None, params).await });
        }
        let pull = Some(self.client.pull_for(params, Some(next)));
        // In asynchronous mode it comes with the answer to the push.
        let timeout = self.client.config.timeout;
        let ask = || self.client.caller.call("take a token", Command::Token, timeout);
        let asked = synchronous.then(ask);
        let caller = &joined.caller;
        let (pushed, found, granted) = (None, None, None);
        let mut ahead = Ahead { caller, next, push, pushed, pull, found, asked, granted };
        let push = poll_fn(|context| ahead.poll(context, params)).await?;
        let Ahead { found, asked, granted, .. } = ahead;
        let granted = match (granted, asked) {
            (None, Some(asked)) => {
                Some(asked.await.and_then(|reply| token_of(&joined.caller, reply)))
            }
            (granted, _) => granted,
        };
        Ok(Stepped { push, next: self.next(granted, found, params).await })
    }

    /// The next token, if it has not been granted yet, and the values for it, if they are not those that
    /// were found.
    async fn next(
        &mut self,
        granted: Option<Result<Option<Token>, Error>>,
        found: Option<Read>,
        params: &mut Params,
    ) -> Result<Option<Token>, Error> {
        let mut next = match granted {
            Some(granted) => granted?,
            None => self.token().await?,
        };
        if let (Some(token), Some(read)) = (&next, found) {
            let is_for_it = match self.client.welcomed.synchronous {
                true => read.step.0 == token.step(),
                false => read.step.0 >= token.step(),
            };
            if is_for_it {
                token.has_read(read);
                return Ok(next);
            }
        }
        while let Some(token) = &next
            && self.pull(token, params).await?.is_stale()
        {
            // It is of no more use, and must not be out while another is asked for.
            drop(next.take());
            next = self.token().await?;
        }
        Ok(next)
    }
}

/// A push, with the next values and perhaps a token asked for ahead.
struct Ahead<'a> {
    caller: &'a Caller,
    /// The step of the values.
    next: GlobalStep,
    push: PushHandle,
    pushed: Option<Push>,
    pull: Option<PullCall>,
    found: Option<Read>,
    asked: Option<Call>,
    granted: Option<Result<Option<Token>, Error>>,
}

impl Ahead<'_> {
    /// Waits for the push and for what was asked for ahead, as far as that will be of use.
    fn poll(
        &mut self,
        context: &mut Context<'_>,
        params: &mut Params,
    ) -> Poll<Result<Push, Error>> {
        if let Some(pull) = &mut self.pull
            && let Poll::Ready(found) = pull.poll_into(context, params)
        {
            // Whatever is wrong with it is met again by whoever pulls for the token.
            (self.pull, self.found) = (None, found.ok().flatten());
        }
        if let Some(asked) = &mut self.asked
            && let Poll::Ready(reply) = Pin::new(asked).poll(context)
        {
            let token = reply.and_then(|reply| token_of(self.caller, reply));
            (self.asked, self.granted) = (None, Some(token));
        }
        if self.pushed.is_none() {
            // The values come last, as a rule: one wake is enough for both.
            self.push.wakes_if_applied(self.pull.is_none());
            if let Poll::Ready(pushed) = Pin::new(&mut self.push).poll(context) {
                self.pushed = Some(pushed?);
            }
        }
        if self.pull.is_some() && !self.values_are_to_come() {
            self.pull = None;
        }
        match self.pushed {
            Some(pushed) if self.pull.is_none() => Poll::Ready(Ok(pushed)),
            _ => Poll::Pending,
        }
    }

    /// Whether the step of the values will be made without more of this worker's doing, and the next token
    /// is for it.
    fn values_are_to_come(&self) -> bool {
        let counts = self
            .pushed
            .is_none_or(|pushed| matches!(pushed, Push::Applied { .. } | Push::Accepted { .. }));
        // A replica may have a share of several gradients in a step.
        let of_next = match &self.granted {
            None => true,
            Some(Ok(Some(token))) => token.step() == self.next.0,
            Some(Ok(None)) => true,
            Some(Err(_)) => false,
        };
        counts && of_next
    }
}
