//! Pulling: all values at once, those of one variable, or rows.

use pushpull_common::ids::GlobalStep;
use pushpull_common::tensor::Element;

use super::Worker;
use crate::error::{Error, ViewError};
use crate::handles::{PullHandle, VariableHandle};
use crate::outcome::Pulled;
use crate::params::{Params, locate};
use crate::token::Token;

impl Worker {
    /// Replaces all of `params` by the servers' values.
    ///
    /// In asynchronous mode they are at least as new as the token's step; values of different shards
    /// may be of different steps. In synchronous mode all are exactly of the token's step, each shard
    /// being waited for until it has applied the steps before; if one has applied this step already
    /// the token is of no more use, `params` is as it was and the answer is [`Pulled::Stale`].
    ///
    /// The pull is under way once this returns, and borrows nothing of the worker: await the handle when
    /// the values are needed. On an error, or if it is dropped, `params` is as it was.
    pub fn pull<'a>(&mut self, token: &'a Token, params: &'a mut Params) -> PullHandle<'a> {
        let step = Some(GlobalStep(token.step()));
        let call = match self.joined("pull") {
            Err(error) => self.client.refuse_pull(error),
            Ok(joined) if !joined.plan.is_same(&params.plan) => {
                self.client.refuse_pull(Error::ForeignBuffer)
            }
            Ok(_) => self.client.pull_for(params, step),
        };
        PullHandle { call, token, params }
    }

    /// Pulls the values of one variable that is not sparse into `values`, which is as long as it.
    ///
    /// Variables that are asked for in the order of their first use come in that order, each known to be
    /// there when its handle is done: computing can begin with the first while the others are on their
    /// way. They are of the step that [`Worker::pull`] would give; in asynchronous mode each may be of a
    /// step of its own, in synchronous mode all are of the token's. Servers that compensate gradients for
    /// their delay keep what [`Worker::pull`] reads, and not this.
    ///
    /// It is under way once this returns, and borrows nothing of the worker. On an error, or if the handle
    /// is dropped, `values` is as it was. Cost: a request to each shard that holds a part of the variable,
    /// and a copy of it.
    pub fn pull_variable<'a, T: Element>(
        &mut self,
        token: &'a Token,
        name: &str,
        values: &'a mut [T],
    ) -> VariableHandle<'a> {
        let step = Some(GlobalStep(token.step()));
        let elements = values.len();
        let values: &mut [u8] = bytemuck::cast_slice_mut(values);
        let found = self.joined("pull").and_then(|joined| {
            let (id, range) = locate::<T>(&joined.plan, name)?;
            if range.len() == values.len() {
                return Ok((&joined.plan, id));
            }
            let shape = joined.plan.catalogue().variable(id).shape().to_string();
            Err(ViewError::Length { name: name.to_owned(), elements, shape }.into())
        });
        let call = match found {
            Ok((plan, id)) => self.client.pull_variable(plan, id, step),
            Err(error) => self.client.refuse_pull(error),
        };
        VariableHandle { call, token, values }
    }

    /// Pulls rows of a sparse variable into `rows`, one behind the other in the order of `ids`, which
    /// may be in any order and there more than once.
    ///
    /// They are of the step that [`Worker::pull`] would give; those of one shard that travel in one
    /// request, of up to 1 MiB, are of one version. On an error, or if the future is dropped, `rows`
    /// is as it was. Cost: 4 bytes to the servers for each row, and the rows back.
    pub async fn pull_rows<T: Element>(
        &mut self,
        token: &Token,
        name: &str,
        ids: &[u64],
        rows: &mut [T],
    ) -> Result<Pulled, Error> {
        let plan = self.joined("pull rows")?.plan.clone();
        let step = Some(GlobalStep(token.step()));
        match self.client.pull_rows(&plan, name, ids, rows, step).await? {
            Some(read) => {
                let step = read.step.0;
                token.has_read_some(read);
                Ok(Pulled::Pulled { step })
            }
            None => Ok(Pulled::Stale),
        }
    }
}
