"""Statistics of data: scalers, quantiles, vocabularies, fitted by several ranks to the same bits as by one."""
